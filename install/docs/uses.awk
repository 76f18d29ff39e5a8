# uses.awk - where each public function is called: a line of the site's table for each.
#
#   awk -v table=FILE -f uses.awk FILE...
#
#   use  NAME  FILE  LINE  STATEMENT
#
# The first call in examples/ counts, in the order of the files; for what no example calls, the first one
# in the file of tests/ that calls it most. Calls that are meant to fail count where there are no others.

BEGIN {
    FS = "\t"
    while ((getline <table) > 0)
        if ($1 == "function") known[$2] = 1
    close(table)
    $0 = ""
}

function called(name) {
    if (!(name in known) || name in example) return
    if (fails) { if (!(name in spare)) spare[name] = FILENAME "\t" FNR; return }
    if (FILENAME ~ /^examples\//) { example[name] = FILENAME "\t" FNR; return }
    calls[name, FILENAME]++
    if (!((name, FILENAME) in first)) first[name, FILENAME] = FILENAME "\t" FNR
    if (calls[name, FILENAME] > most[name]) {
        most[name] = calls[name, FILENAME]
        test[name] = first[name, FILENAME]
    }
}

{ line = text[FILENAME, FNR] = without_comments($0) }
{ fails = line !~ /^ / || line ~ /DP_ERR|FAIL|REFUSE/ }
line ~ /^ / || line ~ /^FAILS/ {
    for (; match(line, /dp_[a-z0-9_]+\(/); line = substr(line, RSTART + RLENGTH))
        if (substr(line, RSTART - 1, 1) !~ /[A-Za-z0-9_"]/) called(substr(line, RSTART, RLENGTH - 1))
}

function without_comments(line,    at) {
    if (in_comment && !index(line, "*/")) return ""
    if (in_comment) line = substr(line, index(line, "*/") + 2)
    in_comment = 0
    while (at = index(line, "/*")) {
        in_comment = !index(line, "*/")
        line = substr(line, 1, at - 1) (in_comment ? "" : substr(line, index(line, "*/") + 2))
    }
    sub(/\/\/.*/, "", line)
    sub(/ +$/, "", line)
    return line
}

# The statement with this line, in a few lines, with the library's own macros for those of tests.
function statement(file, at,    whole, i) {
    while (text[file, at - 1] ~ /[(,=]$/ && i++ < 3) at--
    for (i = 0; i < 5 && whole !~ /[;{}]$/; i++) whole = whole text[file, at + i]
    gsub(/ +/, " ", whole)
    gsub(/\( /, "(", whole)
    sub(/^ /, "", whole)
    sub(/^(CHECK_OK|MUST|TRY)\(/, whole ~ /^TRY/ ? "DP_TRY(" : "DP_CHECK(", whole)
    return whole
}

END {
    for (name in known) {
        place = name in example ? example[name] : name in test ? test[name] : spare[name]
        if (place == "") continue
        split(place, at, "\t")
        print "use\t" name "\t" place "\t" statement(at[1], at[2])
    }
}
