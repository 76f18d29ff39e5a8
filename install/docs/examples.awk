# examples.awk - a table in Markdown of the examples, with the first words of each.
#
#   awk -f examples.awk examples/*.c

BEGIN { print "# Examples\n\n`make demo` builds and runs them.\n\n| example | what it shows |\n|---|---|" }
FNR == 1 {
    text = $0
    sub(/^\/\* [a-z0-9_.]+ - /, "", text)
    open = 1
    next
}
open && (/^$/ || /^   (Build|Run|Prints):/) {
    gsub(/\|/, "/", text)
    print "| `" FILENAME "` | " toupper(substr(text, 1, 1)) substr(text, 2) " |"
    open = 0
}
open { sub(/^ +/, " "); sub(/ *\*\/$/, ""); text = text $0 }
