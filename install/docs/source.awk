# source.awk - a file of C in colour, with a number at each line. Where functions are defined
# is added to the file `definitions`: a line of the table for each.
#
#   awk -v definitions=FILE ... -f html.awk -f source.awk dp/value.h

# The first line of a function in column 0 has its name; the line with its brace says that it is one.
function definition(    name) {
    if (/^[A-Za-z].* \**dp_[a-z0-9_]+\(/ && !/;$/) {
        match($0, /dp_[a-z0-9_]+\(/)
        name = substr($0, RSTART, RLENGTH - 1)
        if (name !~ /^dp__/) { defining = name; defined_on = FNR }
    } else if (/^[{]/ && defining != "") {
        print "defined\t" defining "\t" FILENAME "\t" defined_on >>definitions
        defining = ""
    } else if (/;$/) defining = ""
}

FNR == 1 {
    as_in_source = 1
    top(FILENAME)
    print "<h1>" anchor_of_page() "</h1>"
    printf "<pre class=\"source\">"
}

# The name, which leads to the page about it.
function anchor_of_page() {
    return FILENAME in page_url ? anchor(FILENAME) : escape(FILENAME)
}

{
    definition()
    print "<span class=\"line\" id=\"L" FNR "\">" colour($0) "</span>"
}
END {
    print "</pre>"
    bottom()
}
