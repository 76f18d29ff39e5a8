# drawing.awk - a drawing as SVG, in the page's own colours, light and dark. Part of markdown.awk's pages.
#
# A source in drawings/ has one thing a line. A unit is ten pixels, and | ends a line of a text.
#
#   title TEXT                        what it shows, for who cannot see it
#   size W H
#   box X Y W H KIND TEXT             KIND: plain, strong, soft, or frame, which has its text on top
#   text X Y start|middle|end TEXT
#   arrow X Y X Y                     also: line
#   repeat COUNT DX DY                the next line so many times, each further on; # in it is the number

# The words of a line from number n on.
function rest_of(line, n,    i) {
    for (i = 1; i < n; i++) if (!sub(/^[^ ]+ +/, "", line)) return ""
    return line
}

function put_text(x, y, at, class, text,    list, n, i) {
    n = split(text, list, "|")
    for (i = 1; i <= n; i++)
        printf "<text class=\"%s\" x=\"%g\" y=\"%g\" text-anchor=\"%s\">%s</text>\n", class, 10 * x, \
            10 * y + 17 * (i - 1 - (n - 1) / 2) + 5, at, escape(list[i])
}

function put_box(x, y, w, h, kind, text) {
    printf "<rect class=\"%s\" x=\"%g\" y=\"%g\" width=\"%g\" height=\"%g\" rx=\"4\"/>\n", kind, 10 * x, \
        10 * y, 10 * w, 10 * h
    if (kind == "frame") put_text(x + .8, y + 1.1, "start", "quiet", text)
    else if (text != "") put_text(x + w / 2, y + h / 2, "middle", kind "-text", text)
}

function put_line(line, dx, dy,    word) {
    split(line, word, / +/)
    if (word[1] == "box")
        put_box(word[2] + dx, word[3] + dy, word[4], word[5], word[6], rest_of(line, 7))
    else if (word[1] == "text")
        put_text(word[2] + dx, word[3] + dy, word[4], "quiet", rest_of(line, 5))
    else if (word[1] ~ /^(arrow|line)$/)
        printf "<line class=\"%s\" x1=\"%g\" y1=\"%g\" x2=\"%g\" y2=\"%g\"/>\n", word[1], \
            10 * (word[2] + dx), 10 * (word[3] + dy), 10 * (word[4] + dx), 10 * (word[5] + dy)
}

function draw(path,    line, word, times, dx, dy, i, copy) {
    times = 1
    dx = dy = 0
    while ((getline line <path) > 0) {
        split(line, word, / +/)
        if (line ~ /^(#|$)/) continue
        if (word[1] == "title") drawing_title = escape(rest_of(line, 2))
        else if (word[1] == "size") {
            printf "<svg class=\"drawing\" xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" viewBox=\"0 0 %g %g\" " \
                "style=\"max-width: %gpx\">\n<title>%s</title>\n", 10 * word[2], 10 * word[3], 10 * word[2], \
                drawing_title
            print "<defs><marker id=\"head-" ++drawings "\" viewBox=\"0 0 8 8\" refX=\"7\" refY=\"4\" " \
                "markerWidth=\"7\" markerHeight=\"7\" orient=\"auto\"><path class=\"head\" d=\"M0 0 8 4 0 8z\"/></marker></defs>"
            print "<g marker-end=\"none\">"
        } else if (word[1] == "repeat") { times = word[2]; dx = word[3]; dy = word[4] }
        else {
            for (i = 0; i < times; i++) {
                copy = line
                gsub(/#/, i, copy)
                put_line(copy, i * dx, i * dy)
            }
            times = 1
        }
    }
    close(path)
    print "</g></svg>"
}
