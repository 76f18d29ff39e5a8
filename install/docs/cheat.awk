BEGIN { print "# Cheat sheet" }
