# names.awk - a line of the site's table for each public name of a header: docs.sh.
#
#   awk -f ../manual.awk -f names.awk dp.h
#
#   function|type|macro|constant|option|variable|section  NAME  HEADER  LINE  SECTION
#   related  FUNCTION  FUNCTION     the comment above the first one names the second one
#
# An option is a macro of the user's, a variable one of the environment: the manual names them.

function found(kind, name) {
    if (!((kind == "section") SUBSEP name in seen)) print kind "\t" name "\t" FILENAME "\t" FNR "\t" section
    seen[(kind == "section"), name] = 1
}

function begin_header(name, description) {}
function heading(text) { options = text ~ /^OPTIONS/ }
function begin_section(name) {
    end_item()
    section = name
    found("section", name)
    options = 0
}
function begin_declarations() {}

# An item is a comment and what is declared below it: page.awk.
function end_item(    i, k) {
    for (i = 1; i <= declared; i++)
        for (k = 1; k <= mentions; k++)
            if (own[i] != mention[k]) print "related\t" own[i] "\t" mention[k]
    declared = mentions = 0
}

function mentioned(line) {
    for (; match(line, /dp_[a-z0-9_]+/); line = substr(line, RSTART + RLENGTH))
        mention[++mentions] = substr(line, RSTART, RLENGTH)
}

# $DP_NAME, where it is named first.
function fill(line) {
    while (match(line, /\$DP_[A-Z_]+/)) {
        found("variable", substr(line, RSTART + 1, RLENGTH - 1))
        line = substr(line, RSTART + RLENGTH)
    }
}

# "  DP_NAME, DP_OTHER(parameter)     what they do"
function table(line,    i, n, list) {
    sub(/^ +/, "", line)
    if (!options || line !~ /^DP_[^ ]+(, DP_[^ ]+)*  /) return
    sub(/  .*/, "", line)
    n = split(line, list, ", ")
    for (i = 1; i <= n; i++) {
        sub(/\(.*/, "", list[i])
        found("option", list[i])
    }
}

function type(line,    name) {
    name = line
    if (line ~ /^(typedef )?(struct|enum|union) dp_[a-z0-9_]+ *[{]/) sub(/ *[{].*/, "", name)
    else if (line ~ /^}.* dp_[a-z0-9_]+;/) sub(/;.*/, "", name)
    else if (line ~ /^    dp_[a-z0-9_]+ [{]/) sub(/ [{].*/, "", name)
    else if (line ~ /^typedef .*\(\*dp_[a-z0-9_]+\)\(/) { sub(/^.*\(\*/, "", name); sub(/\).*/, "", name) }
    else if (line ~ /^typedef .* dp_[a-z0-9_]+;/) {
        sub(/;.*/, "", name)
        sub(/^.* /, "", name)
        opaque[++opaques] = name # unless it is defined later
        opaque_at[name] = FNR
        opaque_in[name] = section
        return
    } else return
    sub(/^.* /, "", name)
    if (name !~ /^dp__/) found("type", name)
}

# DP_NAME, of #define, of an enum, or of a list that an enum is made from.
function constants(line,    name, rest) {
    if (line ~ /^ *# *define DP_[A-Z]/) {
        match(line, /DP_[A-Z0-9_]+/)
        name = substr(line, RSTART, RLENGTH)
        if (name !~ /^DP__|_H$/) found("macro", name)
    }
    for (rest = line; match(rest, /X\(DP_[A-Z0-9_]+/); rest = substr(rest, RSTART + RLENGTH))
        found("constant", substr(rest, RSTART + 2, RLENGTH - 2))
    if (line ~ /^(typedef )?enum/) enumerators = 1
    while (enumerators && match(line, /[{,)] *DP_[A-Z][A-Z0-9_]*|^ *DP_[A-Z][A-Z0-9_]*/)) {
        name = substr(line, RSTART, RLENGTH)
        line = substr(line, RSTART + RLENGTH)
        sub(/^[{,) ]*/, "", name)
        if (name !~ /^DP__/) found("constant", name)
    }
}

function code(line,    name) {
    if (verbatim_text) table(line)
    else if ((empty && line !~ /^[ }]/) || (line ~ /^\/\*/ && declared)) end_item()
    if (verbatim_text || in_comment || line ~ /^\/\*/) { # prose
        in_comment = !verbatim_text && line !~ /\*\/$/
        if (!verbatim_text) mentioned(line)
        return
    }
    name = declares()
    if (name != "") {
        found("function", name)
        own[++declared] = name
    }
    type(line)
    constants(line)
    if (line ~ /}/) enumerators = 0
}

function end_header(    i, name) {
    end_item()
    for (i = 1; i <= opaques; i++) {
        name = opaque[i]
        if (!((0, name) in seen)) print "type\t" name "\t" FILENAME "\t" opaque_at[name] "\t" opaque_in[name]
    }
}
