# commands.awk - what a page says that one types, as a script for bash: files that it shows are written,
# and commands are run, one after the other. OUT/n.want has what command n should print, n.got gets what it
# prints. What needs Python's packages is left out without $PYTHON.
#
#   awk -v out=OUT -f commands.awk PAGE.md

function finish() {
    if (number) close(out "/" number ".want")
    open = 0
}

/^<!-- [a-z_]+\.[a-z]+ -->$/ { file = $2; next }
/^```/ {
    if (fenced && file != "") print "END_OF_FILE"
    fenced = !fenced
    if (fenced && file != "") print "cat " (file in begun ? ">>" : ">") file " <<'END_OF_FILE'"
    if (fenced) begun[file] = 1
    else file = ""
    next
}
fenced { if (file != "") print; next }
/^    \$ / {
    finish()
    number++
    open = 1
    text = substr($0, 7)
    print text >(out "/" number ".command")
    printf "" >(out "/" number ".want")
    if (text ~ /^python3 /) print "[ -z \"$PYTHON\" ] ||"
    print "{ " text
    print "} >" out "/" number ".got 2>&1 </dev/null && touch " out "/" number ".well"
    next
}
/^    / && open { print substr($0, 5) >(out "/" number ".want"); next }
{ finish() }
/[^ ]/ && !/^<!--/ { file = "" }
