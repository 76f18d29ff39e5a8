# html.awk - what all pages of the site have: a frame, links, C in colour.
#
#   awk -v table=FILE -v here=source/dp.h.html -v root=../ -v entries=FILE -f html.awk -f ...
#
# The table, of docs.sh and names.awk, says what can be linked to; `here` is the page, and root leads
# from it to the first one. What the search finds is added to the file `entries`.

BEGIN {
    FS_before = FS
    FS = "\t"
    while ((getline <table) > 0) {
        if ($1 == "page") {
            pages++
            page_url[$2] = $3
            page_title[$3] = $4
            page_group[$3] = $5
            page_at[pages] = $3
        } else if ($1 == "part") part_url[$2, $3] = $4
        else if ($1 == "file") source_url[$2] = "source/" $2 ".html"
        else if ($1 == "defined") defined_at[$2] = "source/" $3 ".html#L" $4
        else if ($1 == "section") section_of[$3, $2] = 1
        else if ($1 == "related") related[$2] = related[$2] " " $3
        else if ($1 == "topic") topics[$2] = topics[$2] $3 "\n"
        else if ($1 == "use") { use_at[$2] = $3 " " $4; use_of[$2] = $5 }
        else if ($1 == "errors") errors_of[$2] = $3
        else if ($1 == "says") says[$2] = says[$2] $3 "\n"
        else if (!($2 in kind_of)) {
            name_of[++names] = $2
            kind_of[$2] = $1
            header_of[$2] = $3
            line_of[$2] = $4
            section_with[$2] = $5
        }
    }
    close(table)
    FS = FS_before
    $0 = ""
    split("break case const continue default do else enum extern for goto if inline return sizeof " \
          "static struct switch typedef union volatile while register _Static_assert _Atomic", list, " ")
    for (word in list) keyword[list[word]] = "k"
    split("bool char double float int long short signed size_t unsigned void int8_t int16_t int32_t " \
          "int64_t uint8_t uint16_t uint32_t uint64_t FILE", list, " ")
    for (word in list) keyword[list[word]] = "t"
}

function escape(text) {
    gsub(/&/, "\\&amp;", text); gsub(/</, "\\&lt;", text); gsub(/>/, "\\&gt;", text)
    gsub(/"/, "\\&quot;", text)
    return text
}

function slug(text) {
    text = tolower(text)
    gsub(/[^a-z0-9]+/, "-", text)
    gsub(/^-|-$/, "", text)
    return text
}

# The page that has a section of a header; "" is the manual before all sections.
function page_of(header, section) {
    return (header, section) in part_url ? part_url[header, section] : page_url[header]
}

# Where a name, >>tag or file leads; "" if nowhere.
function href(word,    tag) {
    if (word in kind_of) return root page_of(header_of[word], section_with[word]) "#" word
    if (word in page_url) return root page_url[word]
    if (word in source_url) return root source_url[word]
    if (word !~ /^>>/) return ""
    tag = substr(word, 3)
    if ((FILENAME, tag) in section_of) return root page_of(FILENAME, tag) "#" tag
    if (("dp.h", tag) in section_of) return root page_of("dp.h", tag) "#" tag
    return ""
}

# Where text is shown as it is, so is the mark of a tag.
function anchor(word,    url) {
    url = href(word)
    if (url != "" && !as_in_source) sub(/^>>/, "", word)
    return url == "" ? escape(word) : "<a href=\"" url "\">" escape(word) "</a>"
}

# Text in which names, tags and files lead somewhere.
function linked(text,    out, word, dots) {
    while (match(text, /(dp|examples|tests)\/[A-Za-z0-9_\/.]*[a-z]|dp_[a-z]+\.h|dp_[a-z0-9_]+|DP_[A-Z0-9_]+|>>[a-z_]+/)) {
        word = substr(text, RSTART, RLENGTH)
        out = out escape(substr(text, 1, RSTART - 1)) anchor(word)
        text = substr(text, RSTART + RLENGTH)
    }
    return out escape(text)
}

function span(class, text) { return "<span class=\"" class "\">" text "</span>" }

# A line of C; `in_comment` goes from one to the next.
function colour(line,    out, at, word) {
    while (line != "") {
        if (in_comment) {
            at = index(line, "*/")
            word = at ? substr(line, 1, at + 1) : line
            in_comment = !at
            line = substr(line, length(word) + 1)
            out = out span("c", linked(word))
            continue
        }
        if (!match(line, /\/\*|\/\/|"|'|[A-Za-z_][A-Za-z_0-9]*|[0-9][0-9A-Za-z_.]*|#/)) return out escape(line)
        out = out escape(substr(line, 1, RSTART - 1))
        word = substr(line, RSTART, RLENGTH)
        if (word == "/*") {
            line = substr(line, RSTART)
            in_comment = index(substr(line, 3), "*/")
            if (in_comment) word = substr(line, 1, in_comment + 3)
            else word = line
            in_comment = !in_comment
            out = out span("c", linked(word))
            line = substr(line, length(word) + 1)
            continue
        }
        line = substr(line, RSTART)
        if (word == "//") { out = out span("c", linked(line)); line = ""; continue }
        if (word == "\"" || word == "'") {
            match(line, word == "'" ? "^'([^'\\\\]|\\\\.)*'?" : "^\"([^\"\\\\]|\\\\.)*\"?")
            word = substr(line, 1, RLENGTH)
            out = out span("s", escape(word))
        } else if (word == "#") {
            match(line, /^# *[a-z]*/)
            word = substr(line, 1, RLENGTH)
            out = out span("p", word)
        } else if (word in keyword) out = out span(keyword[word], word)
        else if (word ~ /^[0-9]/) out = out span("n", word)
        else out = out (word ~ /^[dD][pP]_/ ? anchor(word) : word)
        line = substr(line, length(word) + 1)
    }
    return out
}

# What the search finds: kind, name, where it is, words.
function entry(kind, name, url, text) {
    gsub(/[\t\n ]+/, " ", text)
    text = "[\"" kind "\",\"" name "\",\"" url "\",\"" script(text) "\"],"
    print text >>entries
}

# As a string of JavaScript; backslashes mean different things to gsub in different awks.
function script(text,    part, n, i) {
    n = split(text, part, /\\/)
    text = part[1]
    for (i = 2; i <= n; i++) text = text "\\\\" part[i]
    n = split(text, part, /"/)
    text = part[1]
    for (i = 2; i <= n; i++) text = text "\\\"" part[i]
    return text
}

# The page up to its own text; `class` is for style.css.
function top(title, class,    i, url, group) {
    print "<!DOCTYPE html>"
    print "<html xmlns=\"http://www.w3.org/1999/xhtml\" lang=\"en\">"
    print "<head>"
    print "<meta charset=\"utf-8\"/>"
    print "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>"
    print "<meta name=\"color-scheme\" content=\"light dark\"/>"
    print "<title>" escape(title) "</title>"
    print "<link rel=\"stylesheet\" href=\"" root "style.css\"/>"
    print "</head>"
    print "<body" (class == "" ? "" : " class=\"" class "\"") ">"
    print "<header>"
    print "<a class=\"home\" href=\"" root "index.html\">dp.h</a>"
    print "<input id=\"search\" type=\"search\" placeholder=\"Search: press /\" aria-label=\"Search\" autocomplete=\"off\"/>"
    print "</header>"
    print "<ol id=\"found\" hidden=\"hidden\"></ol>"
    print "<nav aria-label=\"Pages\"><details open=\"open\"><summary>Pages</summary>"
    for (i = 1; i <= pages; i++) {
        url = page_at[i]
        if (page_group[url] != group) {
            if (group != "") print "</ul>"
            group = page_group[url]
            print "<h2>" escape(group) "</h2><ul>"
        }
        print "<li><a" (url == here ? " class=\"here\"" : "") " href=\"" root url "\">" \
            escape(page_title[url]) "</a></li>"
    }
    print "</ul></details></nav>"
    print "<main>"
}

function bottom() {
    print "</main>"
    print "<script src=\"" root "entries.js\"></script>"
    print "<script src=\"" root "search.js\" data-root=\"" root "\"></script>"
    print "</body>"
    print "</html>"
}
