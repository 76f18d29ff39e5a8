# markdown.awk - a page from Markdown, as much of it as these texts use: headings, paragraphs, tables,
# lists, code, links, strong words.
#
#   awk ... -f html.awk -f drawing.awk -f markdown.awk README.md
#
# Comments that are lines of their own: <!-- NAME.c --> above code is its name; <!-- drawing NAME --> is
# a drawing; after <!-- answers --> each row of a table can be found by itself.

# Of a paragraph: `code`, [text](where), **strong**.
function inline(text,    out, word, cut) {
    while (match(text, /`[^`]+`|\[[^]]*\]\([^)]*\)|\*\*[^*]+\*\*/)) {
        out = out escape(substr(text, 1, RSTART - 1))
        word = substr(text, RSTART, RLENGTH)
        text = substr(text, RSTART + RLENGTH)
        if (word ~ /^`/) out = out "<code>" linked(substr(word, 2, length(word) - 2)) "</code>"
        else if (word ~ /^\*/) out = out "<strong>" inline(substr(word, 3, length(word) - 4)) "</strong>"
        else {
            cut = index(word, "](")
            out = out "<a href=\"" target(substr(word, cut + 2, length(word) - cut - 2)) "\">" \
                inline_code(substr(word, 2, cut - 2)) "</a>"
        }
    }
    return out escape(text)
}

# Code in the text of a link leads nowhere else.
function inline_code(text) {
    if (text ~ /^`.*`$/) return "<code>" escape(substr(text, 2, length(text) - 2)) "</code>"
    return escape(text)
}

# Where a link leads: a file of the repository or a page, with or without a part of it, or elsewhere.
function target(path,    part, url, folder) {
    if (path ~ /^(https?:|#)/) return escape(path)
    part = ""
    if (match(path, /#/)) { part = substr(path, RSTART); path = substr(path, 1, RSTART - 1) }
    if (path in page_title) return root path part
    folder = FILENAME
    sub(/[^\/]*$/, "", folder)
    while (sub(/^\.\.\//, "", path)) sub(/[^\/]*\/$/, "", folder)
    url = href(folder path)
    return (url == "" ? "missing/" folder path : url) part
}

# A line of a terminal: what is typed stands out, and its prompt is not copied with it.
function command(line) {
    if (line !~ /^\$ /) return escape(line)
    return "<span class=\"prompt\">$ </span><b>" escape(substr(line, 3)) "</b>"
}

function end_paragraph() {
    if (paragraph != "") print inline(paragraph)
    paragraph = ""
}

# layout(TAG): what is open is closed, unless it is this
function layout(tag) {
    end_paragraph()
    if (tag == open_tag) return
    if (open_tag == "table") print "</tbody></table></div>"
    else if (open_tag == "ul" || open_tag == "ol") print "</li></" open_tag ">"
    else if (open_tag != "") print "</" open_tag ">"
    open_tag = tag
    if (tag == "table") print "<div class=\"wide\"><table>"
    else if (tag == "p") print "<p>"
    else if (tag != "" && tag != "pre") print "<" tag ">"
}

function cells(line, tag,    i, n, cell, row, of) {
    gsub(/^\| *| *\|$/, "", line)
    n = split(line, cell, / *\| */)
    for (i = 1; i <= n; i++) row = row "<" tag ">" inline(cell[i]) "</" tag ">"
    if (answers && tag == "td") {
        of = slug(cell[1])
        entry("answer", script(plain(cell[1])), here "#" of, plain(cell[2]))
        return "<tr id=\"" of "\">" row "</tr>"
    }
    return "<tr>" row "</tr>"
}

# Without what marks it.
function plain(text) {
    gsub(/`|\*\*|\|/, "", text)
    gsub(/\]\([^)]*\)/, "", text)
    gsub(/\[/, "", text)
    return text
}

function end_words() {
    if (id != "") entry(FILENAME ~ /^tests/ ? "rule" : "text", title ": " name, here "#" id, plain(words))
    else if (title != "") entry("page", title, here, plain(words))
    words = ""
}

function heading(level, text,    shown) {
    layout("")
    end_words()
    shown = inline_code(text)
    gsub(/`/, "", text)
    name = script(text)
    if (level == 1) {
        title = name
        print "<h1>" shown "</h1>"
        return
    }
    id = slug(text)
    print "<h" level " id=\"" id "\">" shown "</h" level ">"
}

FNR == 1 { top(page_title[here]) }
{ if (!fenced) words = words " " $0 }
/^```/ {
    if (fenced) print "</pre>"
    else layout("")
    fenced = !fenced
    language = substr($0, 4)
    if (fenced && file_name != "") print "<p class=\"file\">" file_name "</p>"
    if (fenced) printf "<pre class=\"code\">"
    in_comment = 0
    next
}
fenced { print (language ~ /^c(pp)?$/ ? colour($0) : escape($0)); next }
/^<!--.*-->$/ {
    layout("")
    file_name = $2 ~ /\.[a-z]+$/ ? $2 : ""
    if ($2 == "drawing") draw("install/docs/drawings/" $3)
    if ($2 == "answers") answers = 1
    next
}
{ file_name = "" }
/^#+ / { match($0, /^#+/); heading(RLENGTH, substr($0, RLENGTH + 2)); next }
/^$/ { gap = 1; next }
/^    / && (open_tag == "pre" || (gap && open_tag !~ /^[uo]l$/)) {
    if (open_tag == "pre" && gap) print ""
    if (open_tag != "pre") { layout("pre"); printf "<pre class=\"code\">" }
    print command(substr($0, 5))
    gap = 0
    next
}
/^\|/ {
    if (open_tag != "table") {
        layout("table")
        print "<thead>" cells($0, "th") "</thead><tbody>"
    } else if (!/^\|[-|: ]+$/) print cells($0, "td")
    gap = 0
    next
}
/^(- |[0-9]+\. )/ {
    kind = /^-/ ? "ul" : "ol"
    if (open_tag == kind) { end_paragraph(); print "</li>" }
    layout(kind)
    match($0, /^(-|[0-9]+\.) +/)
    printf "<li>"
    paragraph = substr($0, RLENGTH + 1)
    gap = 0
    next
}
{
    if (gap && !(open_tag ~ /^[uo]l$/ && /^ /)) layout("")
    if (open_tag ~ /^(table|pre)$/) layout("")
    if (open_tag == "") layout("p")
    sub(/^ +/, "")
    paragraph = paragraph (paragraph == "" ? "" : "\n") $0
    gap = 0
}
END {
    layout("")
    end_words()
    bottom()
}
