# rooms.awk - which headers use private names of which others
#
#   awk -f tests/rooms.awk HEADER...   the headers in the order in which dp.h includes them
#
# Prints "FROM TO NAME" for each name of TO that is in FROM, and "up" behind it where TO comes later;
# of public functions only those, with "public".
# A pointer to a struct, written as such, uses nothing of it.

# A line without comments and texts. `inside`: a comment that began before it has not ended.
function code(line,    at, kept) {
    gsub(/"([^"\\]|\\.)*"/, "\"\"", line)
    while (1) {
        at = index(line, inside ? "*/" : "/*")
        if (at == 0) return inside ? kept : kept line
        if (!inside) kept = kept substr(line, 1, at - 1)
        line = substr(line, at + 2)
        inside = !inside
    }
}

function define(name) { if (!(name in home)) home[name] = FILENAME }

# Defines the first private name of what matches.
function define_in(line, pattern,    text) {
    if (!match(line, pattern)) return
    text = substr(line, RSTART, RLENGTH)
    match(text, /(dp|DP)__[A-Za-z0-9_]+/)
    define(substr(text, RSTART, RLENGTH))
}

# From column 0 to a ; or {, however many lines it takes: a function or a variable. dp/os.h declares
# what a system defines, dp/processes.h what the rooms between processes do, and dp/carrier.h what
# dp/mailbox.h does for a carrier.
function statement_ends(text) {
    if (text ~ /DP_API/ && text ~ /\{$/) {
        match(text, /dp_[a-z0-9_]+\(/)
        if (RSTART) body[substr(text, RSTART, RLENGTH - 1)] = FILENAME
    }
    if (text ~ /^typedef/)
        define_in(text, "dp__[a-z0-9_]+(\\)? *\\(|;)")
    else if (text ~ /\{$/ || text !~ /\(/ || text ~ /=/ || FILENAME ~ /^dp\/(os|processes|carrier)\.h$/)
        define_in(text, "dp__[a-z0-9_]+ *(\\(|\\[|=|;)")
}

FNR == 1 { place[FILENAME] = ++count; inside = enums = 0; statement = "" }

{
    line = rest = code($0)
    gsub(/struct dp__[a-z0-9_]+ \*/, "", rest)
    for (; match(rest, /(dp|DP)__[A-Za-z0-9_]+/); rest = substr(rest, RSTART + RLENGTH))
        used[FILENAME, substr(rest, RSTART, RLENGTH)]
    for (rest = line; match(rest, /dp_[a-z0-9_]+\(/); rest = substr(rest, RSTART + RLENGTH))
        if (substr(rest, RSTART, 4) != "dp__") called[FILENAME, substr(rest, RSTART, RLENGTH - 1)]
    define_in(line, "^#define +DP__[A-Za-z0-9_]+")
    if (line ~ /^#/) next
    define_in(line, "^(typedef )?(struct|union|enum) dp__[a-z0-9_]+ *\\{")
    define_in(line, "^\\} dp__[a-z0-9_]+;")
    enums = enums || line ~ /^(typedef )?enum.*\{/
    if (enums) {
        n = split(line, parts, ",")
        for (k = 1; k <= n; k++) define_in(parts[k], "^[^=]*DP__[A-Z0-9_]+")
    }
    enums = enums && line !~ /\}/
    if (line ~ /^[A-Za-z_]/) statement = line
    else if (statement != "" && line != "") statement = statement " " line
    sub(/ +$/, "", statement)
    if (statement ~ /[;{]$/) {
        statement_ends(statement)
        statement = ""
    }
}

END {
    for (use in called) {
        split(use, part, SUBSEP)
        if (part[2] in body && place[body[part[2]]] > place[part[1]])
            print part[1], body[part[2]], part[2], "public"
    }
    for (use in used) {
        split(use, part, SUBSEP)
        if (!(part[2] in home) || home[part[2]] == part[1]) continue
        print part[1], home[part[2]], part[2], (place[home[part[2]]] > place[part[1]] ? "up" : "")
    }
}
