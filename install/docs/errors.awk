# errors.awk - how each public function fails: lines of the site's table, from what the code returns.
#
#   awk -v table=FILE -f errors.awk dp.h dp/*.h dp_*.h
#
#   errors  NAME  STATUS STATUS ...     INVALID and its like; JOB: that of a job that has failed
#   says    NAME  SENTENCE              one that is its own
#
# A function fails by what it returns itself, and by what those return that it gives its name to, as their
# sentences begin with it. Failures of files, of other ranks and of the user's functions come from deeper.

BEGIN {
    FS = "\t"
    while ((getline <table) > 0)
        if ($1 == "function") public[++publics] = $2
    close(table)
    $0 = ""
}

# The body of a function goes from a brace in column 0 to the next one.
/^[A-Za-z].*[ *]dp_[a-z0-9_]+\(/ && !/^#/ && !/;$/ {
    match($0, /dp_[a-z0-9_]+\(/)
    head = substr($0, RSTART, RLENGTH - 1)
    next
}
/^[{]/ && head != "" { body = head; home[body] = FILENAME; code = ""; next }
/^}/ { if (body != "") read_body(code); body = head = ""; next }
body != "" { line = $0; sub(/^ +/, " ", line); code = code line }
/;$/ && body == "" { head = "" }

function read_body(code,    rest, word, name, holds) {
    holds = code ~ /([{] ?|\.fn = )__func__|^ return dp__/ # in a struct that all get; or nothing else is done
    for (rest = code; match(rest, /(dp_error\( ?|return )DP_ERR_[A-Z_]+/); ) {
        word = substr(rest, RSTART, RLENGTH)
        rest = substr(rest, RSTART + RLENGTH)
        name = body
        if (match(rest, /^, ?"dp_[a-z0-9_]+: /)) {
            name = substr(rest, RSTART, RLENGTH - 2)
            sub(/^, ?"/, "", name)
        }
        fails[name] = fails[name] " " substr(word, index(word, "DP_ERR_") + 7)
        if (word ~ /^dp_error/ && rest ~ /^, ?"/) says[name] = says[name] sentence(rest) "\n"
    }
    for (rest = code; match(rest, /dp_[a-z0-9_]+\(/); ) {
        word = substr(rest, RSTART, RLENGTH - 1)
        rest = substr(rest, RSTART + RLENGTH)
        if (word == body || word == "dp_error") continue
        deeper[body] = deeper[body] " " word
        if (holds || rest ~ /^ ?(__func__|fn|[a-z]+->fn|"dp_[a-z_]+"|&?(plan|holder|walk|reader|writer|own|lines))[,)]/)
            named[body] = named[body] " " word
    }
}

# Literals side by side, with dots for what is filled in and without the function's name.
function sentence(text,    whole) {
    sub(/^, ?/, "", text)
    while (match(text, /^"([^"\\]|\\.)*" ?/)) {
        whole = whole substr(text, 2, RLENGTH - 2 - (substr(text, RLENGTH, 1) == " "))
        text = substr(text, RLENGTH + 1)
    }
    gsub(/%%/, "\001", whole)
    gsub(/%[-#.*0-9]*(ll|z|j)?[a-z]/, "...", whole)
    gsub(/\001/, "%", whole)
    sub(/^(\.\.\.|dp_[a-z_]+): /, "", whole)
    return whole
}

# walk(NAME, BY_NAME): `seen` gets what NAME calls, BY_NAME only what is given its name
function walk(name, by_name,    list, i, n) {
    if (name in seen) return
    seen[name] = 1
    in_order[++walked] = name
    n = split(by_name ? named[name] : deeper[name], list, " ")
    for (i = 1; i <= n; i++) walk(list[i], by_name)
}

function forget() { split("", seen); walked = 0 }

function add(name, which,    list, i, n) {
    n = split(fails[name], list, " ")
    for (i = 1; i <= n; i++) if (which == "" || list[i] ~ which) got[list[i]] = 1
}

END {
    for (i = 1; i <= publics; i++) { # who is called for how many
        forget()
        walk(public[i], 1)
        for (name in seen) callers[name]++
    }
    all = split("INVALID STATE UNSUPPORTED MISMATCH NO_MEMORY NO_DEVICE USER FILE NO_FILE JOB", order, " ")
    for (i = 1; i <= publics; i++) {
        forget()
        split("", got)
        walk(public[i], 1)
        for (w = 1; w <= walked; w++) {
            name = in_order[w]
            add(name)
            if (name == "dp__check_ctx") got["JOB"] = 1
            if (callers[name] <= 4) print_sentences(public[i], says[name])
        }
        forget()
        walk(public[i], 0)
        for (name in seen) add(name, "^(FILE|NO_FILE|MISMATCH|USER)$")
        if (home[public[i]] ~ /^dp_/ && "dp__check_ctx" in seen) got["JOB"] = 1
        text = ""
        for (k = 1; k <= all; k++) if (order[k] in got) text = text " " order[k]
        if (text != "") print "errors\t" public[i] "\t" substr(text, 2)
    }
}

function print_sentences(name, sentences,    list, k, n) {
    n = split(sentences, list, "\n")
    for (k = 1; k < n; k++)
        if (list[k] ~ / / && list[k] !~ /^no memory/ && !said[name, list[k]]++)
            print "says\t" name "\t" list[k]
}
