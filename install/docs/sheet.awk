# sheet.awk - the cheat sheet: what cheat.awk has found, in groups, for one page of paper.
#
#   awk ... -f html.awk -f sheet.awk FILE

BEGIN { FS = "\t" }
FNR == 1 {
    top(page_title[here], "sheet")
    print "<h1>" page_title[here] "</h1>"
    print "<p class=\"lead\">All functions. On paper they are one page, A4 across. Names lead to the manual.</p>"
    print "<div class=\"groups\">"
    entry("page", page_title[here], here, "all functions on one page, to print; reference card")
}
$3 $4 != group {
    if (group != "") print "</ul></section>"
    group = $3 $4
    print "<section><h2><a href=\"" page_of($3, $4) ($4 == "" ? "" : "#" $4) "\">" \
        ($3 == "dp.h" ? $4 : $3 ($4 == "" ? "" : ": " $4)) "</a> <span>" escape($5) "</span></h2><ul>"
}
{
    gsub(/`/, "", $6)
    print "<li><code>" anchor($1) "(" escape($2) ")</code> <span>" escape($6) "</span></li>"
}
END {
    print "</ul></section></div>"
    bottom()
}
