# examples.awk - tables in Markdown of the examples, with the first words of each, in the list's groups.
#
#   awk -v list=FILE -f examples.awk examples/train.c ...

BEGIN {
    while ((getline line <list) > 0) {
        if (line ~ /:$/ && line !~ /^#/) group = substr(line, 1, length(line) - 1)
        else group_of[line] = group
    }
    group = ""
    print "# Examples\n\nWhere to begin: the first five, in this order. `make demo` builds and runs all of them. Each " \
        "program says in its first comment how it is built and what it prints."
}
FNR == 1 {
    text = $0
    sub(/^\/\* [a-z0-9_.]+ - /, "", text)
    open = 1
    next
}
open && (/^$/ || /^#/ || /^   (Build|Run|Prints):/) {
    gsub(/\|/, "/", text)
    if (!(FILENAME in group_of)) group_of[FILENAME] = "Others"
    if (group_of[FILENAME] != group) {
        group = group_of[FILENAME]
        print "\n## " group "\n\n| example | what it shows |\n|---|---|"
    }
    print "| `" FILENAME "` | " toupper(substr(text, 1, 1)) substr(text, 2) " |"
    open = 0
}
open { sub(/^ +/, " "); sub(/ *\*\/$/, ""); text = text $0 }
