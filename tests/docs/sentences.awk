# sentences.awk - which sentences of trouble.md the code does not print: a line for each.
#
#   cat dp.h dp/*.h dp_*.h | tr '\n' ' ' | awk -f sentences.awk install/docs/trouble.md -
#
# A sentence is a heading in `marks`; ... is what the code fills in, or leaves to another word. Literals of
# the code that stand side by side are one.

FILENAME ~ /\.md$/ {
    if (/^### `.*`$/) sentence[++count] = substr($0, 6, length($0) - 6)
    next
}
{
    code = $0
    gsub(/" *"/, "", code)
    gsub(/%[-#.*0-9]*(ll|z|j)?[a-z]/, "\001", code)
    for (i = 1; i <= count; i++)
        if (!printed(sentence[i])) print sentence[i]
}
END { if (count < 20) print "there are " count " sentences" }

# Each ... stands for one thing that is filled in, or for some of them side by side.
function printed(text,    at, parts, n, place, rest) {
    n = split(text, parts, /\.\.\./)
    rest = code
    for (at = 0; (place = index(rest, longest(parts, n))) > 0; rest = substr(rest, place + 1)) {
        at += place
        if (fits(parts, n, at)) return 1
    }
    return 0
}

function longest(parts, n,    k) {
    long = 1
    for (k = 2; k <= n; k++) if (length(parts[k]) > length(parts[long])) long = k
    return parts[long]
}

# Whether the other parts stand before and behind the longest one, which is at this place.
function fits(parts, n, at,    k, end) {
    end = at + length(parts[long])
    for (k = long + 1; k <= n; k++) {
        while (substr(code, end, 1) == "\001") end++
        if (substr(code, end, length(parts[k])) != parts[k]) return 0
        end += length(parts[k])
    }
    for (k = long - 1; k >= 1; k--) {
        while (substr(code, at - 1, 1) == "\001") at--
        at -= length(parts[k])
        if (substr(code, at, length(parts[k])) != parts[k]) return 0
    }
    return 1
}
