# names.awk - a line of the site's table for each public name of a header: docs.sh.
#
#   awk -f ../manual.awk -f names.awk dp.h
#
#   function|type|macro|constant|section  NAME  HEADER  LINE

function found(kind, name) {
    if (!((kind == "section") SUBSEP name in seen)) print kind "\t" name "\t" FILENAME "\t" FNR
    seen[(kind == "section"), name] = 1
}

function begin_header(name, description) {}
function heading(text) {}
function begin_section(name) { found("section", name) }
function begin_declarations() {}
function fill(line) {}

function type(line,    name) {
    name = line
    if (line ~ /^(typedef )?(struct|enum|union) dp_[a-z0-9_]+ *[{]/) sub(/ *[{].*/, "", name)
    else if (line ~ /^}.* dp_[a-z0-9_]+;/) sub(/;.*/, "", name)
    else if (line ~ /^    dp_[a-z0-9_]+ [{]/) sub(/ [{].*/, "", name)
    else if (line ~ /^typedef .*\(\*dp_[a-z0-9_]+\)\(/) { sub(/^.*\(\*/, "", name); sub(/\).*/, "", name) }
    else if (line ~ /^typedef .* dp_[a-z0-9_]+;/) {
        sub(/;.*/, "", name)
        sub(/^.* /, "", name)
        opaque[name] = FNR # unless it is defined later
        return
    } else return
    sub(/^.* /, "", name)
    if (name !~ /^dp__/) found("type", name)
}

# DP_NAME, of #define or of an enum.
function constants(line,    name) {
    if (line ~ /^ *# *define DP_[A-Z]/) {
        match(line, /DP_[A-Z0-9_]+/)
        name = substr(line, RSTART, RLENGTH)
        if (name !~ /^DP__|_H$/) found("macro", name)
    }
    if (line ~ /^(typedef )?enum/) enumerators = 1
    while (enumerators && match(line, /[{,] *DP_[A-Z][A-Z0-9_]*|^ *DP_[A-Z][A-Z0-9_]*/)) {
        name = substr(line, RSTART, RLENGTH)
        line = substr(line, RSTART + RLENGTH)
        sub(/^[{, ]*/, "", name)
        if (name !~ /^DP__/) found("constant", name)
    }
}

function code(line,    name) {
    if (verbatim_text || in_comment || line ~ /^\/\*/) { # prose
        in_comment = !verbatim_text && line !~ /\*\/$/
        return
    }
    name = declares(line)
    if (name != "") found("function", name)
    type(line)
    constants(line)
    if (line ~ /}/) enumerators = 0
}

function end_header(    name) {
    for (name in opaque)
        if (!((0, name) in seen)) print "type\t" name "\t" FILENAME "\t" opaque[name]
}
